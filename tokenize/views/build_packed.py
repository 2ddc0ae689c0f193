"""`tokenize build --pack`: build a dataset, and a packed view of it inside its folder.

    OUT/                   the dataset; with splits, OUT/train and OUT/NAME
    OUT/packed-4096/       its packed view

`tokenize pack` makes the view once the dataset is finished. To resume a killed command, run it
again: the build finds its dataset finished, and the view is made or grows.
"""

from __future__ import annotations

from ...dataplane.datasets.manifest import Manifest
from ...dataplane.storage import storage
from ..builder.build import BuildConfig, build
from ..builder.settings import dataset_url, output_names
from .making import check_same
from .pack import Long, PackConfig, pack


def build_packed(config: BuildConfig, length: int, long: Long = "cut") -> dict[str, Manifest]:
    """Build datasets and their packed views; return manifests by URL, every view after its base."""
    packs = {}
    for split in output_names(config.splits):
        url = dataset_url(config.out.rstrip("/"), split)
        out = storage.join(url, f"packed-{length}")
        packs[url] = PackConfig(
            dataset=url, length=length, out=out, long=long, engine=config.engine
        )
        check_same(out, url, packs[url].entry())
    manifests: dict[str, Manifest] = {}
    for url, manifest in build(config).items():
        manifests |= {url: manifest, packs[url].out: pack(packs[url])}
    return manifests
