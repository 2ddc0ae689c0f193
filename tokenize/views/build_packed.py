"""`tokenize build --pack`: build a dataset, and a packed view of it inside its folder.

    OUT/                   the dataset; with splits, OUT/train and OUT/NAME
    OUT/packed-4096/       its packed view

The view is made by the code of `tokenize pack` after the dataset is finished. A killed command is
run again: the build finds its dataset finished, and the view is made or grows.
"""

from __future__ import annotations

from ...dataplane.datasets.manifest import Manifest
from ...dataplane.storage import storage
from ..builder.build import BuildConfig, build
from ..builder.settings import dataset_url, outputs_of
from .making import check_same
from .pack import Long, PackConfig, pack


def build_packed(config: BuildConfig, length: int, long: Long = "cut") -> dict[str, Manifest]:
    """Build datasets and their packed views; return the manifests by URL, each view after its
    dataset."""
    packs = {}
    for name in outputs_of(config.splits):
        url = dataset_url(config.out.rstrip("/"), name)
        out = storage.join(url, f"packed-{length}")
        packs[url] = PackConfig(
            dataset=url, length=length, out=out, long=long, engine=config.engine
        )
        check_same(out, url, packs[url].entry())
    manifests: dict[str, Manifest] = {}
    for url, held in build(config).items():
        manifests |= {url: held, packs[url].out: pack(packs[url])}
    return manifests
