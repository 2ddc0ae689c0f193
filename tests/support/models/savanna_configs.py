"""Small configurations with the key sets of Savanna's published ones, for tests of the conversion.

The keys, their spelling and their structure are those of the published files; sizes are our own.
"""

from __future__ import annotations

COMMON = """
use_wandb: true
print_mem_alloc_stats: false
log_memory_stats: true
recycle_events: true
disable_gc: true
pipe_parallel_size: 0
sequence_parallel: true
make_vocab_size_divisible_by: 8
prenorm: true
postnorm: false
pre_mlp_norm: true
outer_mlp_norm: false
no_weight_tying: false
gpt_j_residual: false
normalize_hyena_filters: false
short-conv-L: 3
hyena_filter_wd: 0.0
use_fast_heads: false
use_slow_heads: false
use-hyena-filter: true
output_layer_parallelism: column
bias_dropout_fusion: false
norm: rmsnorm
rms_norm_epsilon: 1.0e-6
identity_mlp: false
scaled-upper-triang-masked-softmax-fusion: true
bias-gelu-fusion: false
init_method: small_init
output_layer_init_method: wang_init
zero_optimization: {stage: 1, overlap_comm: true, cpu_offload: false}
gradient_clipping: 1.0
weight-decay: 0.1
hidden-dropout: 0.0
attention-dropout: 0.0
precision: bfloat16
bf16: {enabled: true}
distributed-backend: nccl
lr-decay-style: cosine
eval-interval: 100
eval-iters: 20
log-interval: 5
steps_per_print: 5
wall_clock_breakdown: false
tokenizer_type: CharLevelTokenizer
materialize_attn_mask: false
fast_conv_proj: true
to_upper: normalized_weighted
lowercase_loss_reweighting: 0.1
pos_emb: rotary
rotary_pct: 1
"""

STRIPED = (
    COMMON
    + """
interleave_projections: false
seq_length: 128
max_position_embeddings: 128
train-iters: 400
lr-decay-iters: 400
warmup: 0.015
mask_loss_control_tags: true
checkpoint-factor: 200
save_retain_interval: 400
keep-last-n-checkpoints: 10
model_parallel_size: 1
train_micro_batch_size_per_gpu: 8
gradient_accumulation_steps: 1
checkpoint-activations: true
checkpoint-num-layers: 2
num_layers: 6
hidden_size: 64
num_attention_heads: 4
num_groups_hyena: 64
num_groups_hyena_medium: 8
num_groups_hyena_short: 16
num_groups_hyena_mlp: 16
operator-config:
  - [['hyena_se'], 1]
  - [['hyena_mr'], 1]
  - [['hyena'], 1]
  - [['flash_v2'], 1]
  - [['hyena_se', 'hyena'], 1]
use_cgcg: false
hyena_mr_len: 32
rotary_emb_base: 1000000
hyena_filter_fast_decay: 0.3
hyena_filter_slow_decay: 1.2
hyena_filter_w: 14
hyena_filter_cls: implicit_modal
hyena_medium_filter_cls: explicit_single_decay
explicit_filter_decay_preset: weak
explicit_filter_num_decay_repeats: 2
hyena_filter_order: 16
activation: gelu
mlp_type: llama
optimizer: {type: Adam, params: {lr: 0.0002, betas: [0.9, 0.95], eps: 1.0e-8}}
min_lr: 2.0e-5
make_gated_mlp_multiple_of: 128
use_fp8_mlp_projections: true
hyena_se_len: 7
"""
)
"""After the production models: six layers, implicit modal filters, gated MLPs."""

SHORT_MLP = (
    COMMON
    + """
num_layers: 4
hidden_size: 64
num_attention_heads: 4
num_heads: 64
operator-config: [[["hyena_short_conv"], 1], [["hyena_medium_conv"], 1], [["hyena"], 2]]
seq_length: 64
max_position_embeddings: 64
hyena_medium_conv_len: 16
hyena_filter_cls: implicit_real_modal
hyena_medium_filter_cls: explicit_single_decay
hyena_filter_order: 8
mlp_type: short_hyena
hyena_mlp_len: 7
hyena_mlp_postgate: False
hyena_mlp_expansion_factor: 1.5
hyena_short_conv_len: 7
hyena_short_conv_pregate: False
optimizer: {"type": "Adam", "params": {"lr": 0.000818, "betas": [0.9, 0.95], "eps": 1.0e-8}}
min_lr: 0.0000818
train_micro_batch_size_per_gpu: 4
gradient_accumulation_steps: 2
train-iters: 100
lr-decay-iters: 200
warmup: 0.01
"""
)
"""After the ablations with short filters as MLPs, in the older names of keys."""

FREEFORM = (
    COMMON.replace("lr-decay-style: cosine", "lr-decay-style: linear")
    + """
num_layers: 4
hidden_size: 32
num_attention_heads: 4
operator-config: [[["hyena", "flash_v2"], all]]
seq_length: 64
max_position_embeddings: 64
hyena_filter_cls: implicit_freeform
hyena_filter_order: 16
hyena_filter_emb_dim: 9
hyena_filter_num_inner_mlps: 1
hyena_filter_fast_decay: 0.3
hyena_filter_slow_decay: 1.2
hyena_filter_w: 14
mlp_type: llama
optimizer: {type: Adam, params: {lr: 6.0e-4, betas: [0.9, 0.95]}}
min_lr: 6.0e-5
train_batch_size: 8
train_micro_batch_size_per_gpu: 4
train-iters: 50
"""
)
"""After the configurations of Evo 1: striped attention, free-form filters."""

DATA = """{
  "train-data-paths": ["/data/genomes/bacteria_document", "/data/genomes/phages_document"],
  "valid-data-paths": ["/data/genomes/bacteria_valid", "/data/genomes/phages_valid"],
  "train-data-weights": [0.3, 0.1],
  "valid-data-weights": [0.5, 0.5],
}
"""
