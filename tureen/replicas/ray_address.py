"""Reads the setting that names a Ray cluster. Imports no Ray."""

from __future__ import annotations

import urllib.parse
from typing import NamedTuple

from tureen.errors import StartupError, echo

SCHEME = "ray://"


class RayCluster(NamedTuple):
    """A cluster, and what each engine takes of it."""

    where: str  # local, auto, or HOST:PORT
    num_engines: int
    num_cpus: float
    num_gpus: float


def parse_cluster(text: str) -> RayCluster:
    """Reads `ray://WHERE?n=…&num_cpus=…&num_gpus=…`. Raises StartupError."""
    url = urllib.parse.urlsplit(text)
    options = dict(urllib.parse.parse_qsl(url.query))
    try:
        cluster = RayCluster(
            url.netloc,
            int(options.pop("n", "1")),
            float(options.pop("num_cpus", "1")),
            float(options.pop("num_gpus", "0")),
        )
        is_right = bool(url.netloc) and 1 <= cluster.num_engines <= 64 and min(cluster.num_cpus, cluster.num_gpus) >= 0
    except ValueError:
        is_right = False
    if not is_right or options or url.path.strip("/"):
        raise StartupError(
            f"--replicas {echo(text)}: must be ray://local, ray://auto or ray://HOST:PORT, and behind it "
            "?n=ENGINES&num_cpus=EACH&num_gpus=EACH, with n from 1 to 64",
            field="replicas",
        )
    return cluster
