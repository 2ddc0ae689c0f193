"""A run and a mixture from Savanna's settings, as YAML data.

Their keys belong to `trainer` and `mixtures`, which check them when they read the files.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Any

from ....console.errors import ConfigProblem
from .settings import SavannaSettings, number

ADAM = {"betas", "eps", "lr", "weight_decay", "wd_free_lr"}
"""Optimizer parameters that are read, or (wd_free_lr) have no effect in Savanna."""
PRECISIONS = {"bfloat16": "bf16", "fp32": "fp32", None: "fp32"}
PHASE = "main"
Data = dict[str, Any]


def convert_run(settings: SavannaSettings) -> tuple[Data, list[str]]:
    """Return a run's YAML data, and what it cannot express."""
    missing: list[str] = []
    rate, parameters = _optimizer(settings, missing)
    betas = parameters.get("betas", [0.9, 0.999])
    epsilon = number(parameters.get("eps", 1e-8), "optimizer.params.eps", settings.source)
    run: Data = {
        "seed": settings.integer("seed"),
        "optimizer": {
            "kind": "adamw",
            "lr": rate,
            "beta1": float(betas[0]),
            "beta2": float(betas[1]),
            "eps": epsilon,
            "weight_decay": settings.number("weight_decay"),
            "decay": "savanna",
            "clip": settings.number("gradient_clipping"),
        },
        "engine": {"kind": "deepspeed", "zero": _zero(settings)},
    }
    if settings["use_fp8_norm"] and settings.number("weight_decay"):
        missing.append("use_fp8_norm: Savanna decays the weights of these norms; headrace does not")
    half = (settings["fp16"] or {}).get("enabled", False)
    precision = settings["precision"] or ("fp16" if half else None)
    if precision not in PRECISIONS:
        missing.append(f"precision: {precision!r}: headrace has bf16 and fp32; bf16 is written")
    run["precision"] = PRECISIONS.get(precision, "bf16")
    layout: Data = {
        ours: settings.integer(theirs)
        for ours, theirs in (
            ("pp", "pipe_parallel_size"),
            ("tp", "model_parallel_size"),
            ("cp", "context_parallel_size"),
        )
        if settings.integer(theirs) > 1
    }
    if settings["use_cp_ring"]:
        layout["attention"] = "ring"
    if layout:
        run["layout"] = layout
    if settings["train_micro_batch_size_per_gpu"] is not None:
        rows = settings.integer("train_micro_batch_size_per_gpu")
        run["micro_batch_tokens"] = rows * settings.integer("seq_length")
    if settings["checkpoint_activations"]:
        run["recompute"] = "block"
    checkpoint_counts = {
        "every": settings["checkpoint_factor"],
        "keep_last": settings["keep_last_n_checkpoints"],
        "keep_every": settings["save_retain_interval"],
    }
    if any(checkpoint_counts.values()):
        run["checkpoints"] = {
            ours: int(value) for ours, value in checkpoint_counts.items() if value
        }
    if settings["use_wandb"]:
        run["watch"] = {"wandb": settings["wandb_project"]}
    return run, missing


def convert_mixture(settings: SavannaSettings, data_parallel: int | None) -> Data:
    """Return a mixture's YAML data: one phase over all datasets."""
    length = settings.integer("seq_length")
    batch = _rows(settings, data_parallel) * length
    sources, weights = _sources(settings)
    return {
        "seed": settings.integer("seed"),
        "isolate_documents": False,
        "sources": sources,
        "phases": {
            PHASE: {
                "tokens": settings.integer("train_iters") * batch,
                "seq_len": length,
                "batch": batch,
                "weights": weights,
                "lr": _schedule(settings, batch),
            }
        },
    }


def _optimizer(settings: SavannaSettings, missing: list[str]) -> tuple[float, Mapping[str, Any]]:
    """Return the learning rate, and the optimizer's parameters."""
    chosen = settings["optimizer"] or {}
    kind, parameters = str(chosen.get("type", "Adam")), chosen.get("params", {})
    if kind.lower() not in ("adam", "adamw"):
        missing.append(f"optimizer: {kind}: headrace has AdamW and Muon; AdamW is written")
    for key in sorted(parameters.keys() - ADAM):
        missing.append(f"optimizer.params.{key}: {parameters[key]!r}: AdamW has no such parameter")
    return number(parameters.get("lr", 1e-3), "optimizer.params.lr", settings.source), parameters


def _zero(settings: SavannaSettings) -> int:
    return int((settings["zero_optimization"] or {}).get("stage", 0))


def _rows(settings: SavannaSettings, data_parallel: int | None) -> int:
    """Return the rows per step, over all ranks."""
    if settings["train_batch_size"] is not None:
        return settings.integer("train_batch_size")
    if data_parallel is None:
        raise settings.refusal(
            ConfigProblem(
                "train_batch_size",
                "is missing: a step has train_micro_batch_size_per_gpu × "
                "gradient_accumulation_steps rows on each data-parallel rank; give the number of "
                "these ranks (--dp)",
            )
        )
    accumulated = settings.integer("gradient_accumulation_steps")
    return settings.integer("train_micro_batch_size_per_gpu") * accumulated * data_parallel


def _schedule(settings: SavannaSettings, batch: int) -> Data:
    """Return the phase's learning-rate schedule, in multiples of the peak."""
    iterations = settings.integer("train_iters")
    period = int(settings["lr_decay_iters"] or iterations)
    lr: Data = {"warmup": round(settings.number("warmup") * period * batch)}
    if settings["lr_decay_style"] == "constant":
        return {**lr, "shape": "constant"}
    peak, _ = _optimizer(settings, [])
    lr |= {"shape": "savanna", "style": settings["lr_decay_style"]}
    lr["end"] = settings.number("min_lr") / peak
    if period != iterations:
        lr["period"] = period * batch
    return lr


def _sources(settings: SavannaSettings) -> tuple[Data, dict[str, float]]:
    """Return the sources, named after their files, and their shares."""
    single = settings["data_path"]
    paths = settings["train_data_paths"] or ([single] if single else ["DATASET"])
    source_weights = settings["train_data_weights"] or [1.0] * len(paths)
    if len(source_weights) != len(paths):
        raise settings.refusal(
            ConfigProblem(
                "train_data_weights", f"has {len(source_weights)} weights for {len(paths)} paths"
            )
        )
    total = sum(map(float, source_weights))
    sources: Data = {}
    weights: dict[str, float] = {}
    for path, weight in zip(map(str, paths), source_weights, strict=True):
        base = PurePosixPath(path).name or "data"
        name = base if base not in sources else f"{base}-{len(sources)}"
        sources[name] = {"data": path}
        weights[name] = float(weight) / total
    return sources, weights
