"""Peers of gpu_step.py: other implementations of models of the same sizes, one GPU, one process.

Their weights and moments are bf16, updated by fused AdamW; headrace keeps fp32 masters and moments.
Rows are one document, because these models do not keep documents apart.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from headrace.models.config.config import ModelConfig

from ._gpu_lines import Line, Sizes
from ._gpu_run import speed, timed_steps

CHUNK = 4096
"""Tokens whose logits the loss by hand computes at once."""
CLIP = 1.0


def measured(
    model: str, sizes: Sizes, weights: Sequence[nn.Parameter], loss: Callable[[Tensor], Tensor]
) -> str:
    """Train and return the text of a line."""
    config = sizes.model(model)
    fused = sizes.device == "cuda"
    optimizer = torch.optim.AdamW(weights, lr=1e-4, fused=fused)
    generator = torch.Generator().manual_seed(0)

    def step() -> float:
        tokens = torch.randint(config.vocab_size, (1, sizes.tokens + 1), generator=generator)
        answer = loss(tokens.to(sizes.device, non_blocking=True))
        answer.backward()
        torch.nn.utils.clip_grad_norm_(weights, CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(answer)

    result = timed_steps(step, sizes)
    line = Line(model=model, packed=False)
    return result.text(speed(line, sizes), sizes.pairs(line))


def compiled(function: Any, sizes: Sizes) -> Any:
    """Apply torch.compile; in a dry run, trace only."""
    return torch.compile(function, backend="aot_eager" if sizes.dry else "inductor")


def of_transformers(model: str, build: Callable[[ModelConfig], nn.Module], sizes: Sizes) -> str:
    """Measure a model of transformers, compiled."""
    config = sizes.model(model)
    try:
        with torch.device(sizes.device):
            peer = build(config).to(torch.bfloat16)
    except ImportError as error:
        return f"not installed: {error}"
    run = compiled(peer, sizes)

    def loss(tokens: Tensor) -> Tensor:
        logits = run(input_ids=tokens[:, :-1]).logits
        return F.cross_entropy(logits.flatten(0, 1).float(), tokens[0, 1:])

    return measured(model, sizes, list(peer.parameters()), loss)


def llama(config: ModelConfig) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    heads = config.operators["attention"].heads  # type: ignore[attr-defined]
    return LlamaForCausalLM(  # type: ignore[no-any-return]
        LlamaConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.width,
            intermediate_size=config.operators["glu"].hidden,  # type: ignore[attr-defined]
            num_hidden_layers=len(config.layers),
            num_attention_heads=heads,
            num_key_value_heads=heads,
            tie_word_embeddings=True,
            use_cache=False,
            attn_implementation="sdpa",
        )
    )


def mamba2(config: ModelConfig) -> nn.Module:
    """Return Mamba-2: its kernels if mamba_ssm and causal_conv1d are installed, else plain
    torch."""
    from transformers import Mamba2Config, Mamba2ForCausalLM

    options: Any = config.operators["mamba"]
    return Mamba2ForCausalLM(  # type: ignore[no-any-return]
        Mamba2Config(
            vocab_size=config.vocab_size,
            hidden_size=config.width,
            num_hidden_layers=len(config.layers),
            state_size=options.state_size,
            head_dim=options.head_dim,
            num_heads=options.expand * config.width // options.head_dim,
            expand=options.expand,
            n_groups=options.groups,
            tie_word_embeddings=True,
            use_cache=False,
        )
    )


def by_hand(compile_it: bool, sizes: Sizes) -> str:
    """Measure the Transformer by hand, compiled or not."""
    config = sizes.model("transformer-1b")
    wrap = partial(compiled, sizes=sizes) if compile_it else None
    weights, loss = transformer_by_hand(config, sizes.tokens, sizes.device, wrap)

    def loss_by_cudnn(tokens: Tensor) -> Tensor:
        with attention_by_cudnn(sizes):
            return loss(tokens)

    return measured("transformer-1b", sizes, weights, loss_by_cudnn)


def transformer_by_hand(
    config: ModelConfig,
    tokens: int,
    device: str,
    wrap: Callable[[Callable[..., Tensor]], Callable[..., Tensor]] | None = None,
) -> tuple[list[nn.Parameter], Callable[[Tensor], Tensor]]:
    """Return the weights and the loss of a Transformer of plain functions: F.linear, SDPA, a loss
    in chunks. `wrap` transforms the function of a block."""
    width, hidden = config.width, config.operators["glu"].hidden  # type: ignore[attr-defined]
    heads = config.operators["attention"].heads  # type: ignore[attr-defined]

    def drawn(*shape: int) -> nn.Parameter:
        x = torch.randn(shape, device=device) * 0.02
        return nn.Parameter(x.bfloat16())

    embedding = drawn(config.vocab_size, width)
    shapes = ((width,), (3 * width, width), (width, width), (width,), (2 * hidden, width))
    layers = [[drawn(*shape) for shape in (*shapes, (width, hidden))] for _ in config.layers]
    last = drawn(width)
    angles = torch.arange(tokens, device=device).outer(
        10000.0 ** -torch.linspace(0, 1, width // heads // 2 + 1, device=device)[:-1]
    )
    cos, sin = angles.cos().bfloat16(), angles.sin().bfloat16()

    def rotated(x: Tensor) -> Tensor:
        a, b = x.chunk(2, dim=-1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)

    def block(
        u: Tensor, norm: Tensor, qkv: Tensor, out: Tensor, norm2: Tensor, up: Tensor, down: Tensor
    ) -> Tensor:
        q, k, v = (
            F.linear(F.rms_norm(u, (width,), norm), qkv)
            .view(1, tokens, 3, heads, -1)
            .permute(2, 0, 3, 1, 4)
        )
        y = F.scaled_dot_product_attention(rotated(q), rotated(k), v, is_causal=True)
        u = u + F.linear(y.transpose(1, 2).flatten(2), out)
        gate, value = F.linear(F.rms_norm(u, (width,), norm2), up).chunk(2, dim=-1)
        return u + F.linear(F.silu(gate) * value, down)

    step = wrap(block) if wrap else block
    total = partial(fused_loss(), matrix=embedding)

    def loss(row: Tensor) -> Tensor:
        u = F.embedding(row[:, :-1], embedding)
        for layer in layers:
            u = step(u, *layer)
        return total(F.rms_norm(u, (width,), last)[0], row[0, 1:]) / tokens

    return [embedding, last, *(weight for layer in layers for weight in layer)], loss


def attention_by_cudnn(sizes: Sizes) -> AbstractContextManager[None]:
    """Prefer cuDNN's attention to flash attention; on the CPU there is one alone."""
    if sizes.dry:
        return nullcontext()
    order = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION]
    return sdpa_kernel(order, set_priority=True)


def fused_loss() -> Callable[..., Tensor]:
    """Return the sum of losses without all logits in memory: Liger's if it is installed, else
    chunks that the backward pass computes again."""
    try:
        from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction
    except ImportError:
        return chunked_loss

    def liger(hidden: Tensor, targets: Tensor, matrix: Tensor) -> Tensor:
        if hidden.device.type == "cpu":
            return chunked_loss(hidden, targets, matrix)
        arguments = (hidden, matrix, targets, None, None, -100, 0.0, 0.0, "sum")
        return LigerFusedLinearCrossEntropyFunction.apply(*arguments)[0]  # type: ignore[no-any-return]

    return liger


def chunked_loss(hidden: Tensor, targets: Tensor, matrix: Tensor) -> Tensor:
    def of_chunk(x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(x, matrix).float(), y, reduction="sum")

    pairs = zip(hidden.split(CHUNK), targets.split(CHUNK), strict=True)
    parts = [checkpoint(of_chunk, x, y, use_reentrant=False) for x, y in pairs]
    return torch.stack(parts).sum()


BY_HAND = "peer of transformer-1b, by hand, compiled"
PEERS: dict[str, Callable[[Sizes], str]] = {
    "peer of transformer-1b, Llama of transformers": partial(
        of_transformers, "transformer-1b", llama
    ),
    "peer of transformer-1b, by hand": partial(by_hand, False),
    BY_HAND: partial(by_hand, True),
    "peer of mamba2-1.3b, Mamba-2 of transformers": partial(of_transformers, "mamba2-1.3b", mamba2),
}
