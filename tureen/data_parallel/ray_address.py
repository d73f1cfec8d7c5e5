"""Reads the setting that names a Ray cluster. Imports no Ray."""

from __future__ import annotations

import os
import secrets
import urllib.parse
from pathlib import Path
from typing import NamedTuple

from tureen.errors import StartupError, echo
from tureen.files import write_private

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
            f"--replicas {echo(text)}: must be ray://local, ray://auto or ray://HOST:PORT, optionally with "
            "?n=ENGINES&num_cpus=EACH&num_gpus=EACH, with n from 1 to 64",
            field="replicas",
        )
    return cluster


RECONNECT_S = 365 * 86400
"""Seconds for which a process of Ray goes on without the cluster's head (gcs_server); Ray's own default is 60."""


def prepare_environment(cluster: RayCluster) -> None:
    """Set what Ray reads from the environment when it is imported, unless the user has set it. Raise StartupError.

    Ray ends a process from within when it has lost the head for too long; the server, its cluster's processes and the
    engines' actors need the head only to place engines. Source: ray_config_def.h, gcs_rpc_server_reconnect_timeout_s.
    """
    os.environ.setdefault("RAY_gcs_rpc_server_reconnect_timeout_s", str(RECONNECT_S))
    if cluster.where != "local":
        return
    os.environ.setdefault("RAY_AUTH_MODE", "token")  # its ports are open to the network
    has_token = "RAY_AUTH_TOKEN" in os.environ or "RAY_AUTH_TOKEN_PATH" in os.environ
    if os.environ["RAY_AUTH_MODE"].lower() == "token" and not has_token:
        _keep_token()


def _keep_token() -> None:
    """Make the file of Ray's token, which Ray itself would make readable for all; close one that others may read.
    Raise StartupError."""
    path = Path("~/.ray/auth_token")
    try:
        path = path.expanduser()
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            write_private(path, secrets.token_hex(32).encode())
        except FileExistsError:
            path.chmod(0o600)
    except (OSError, RuntimeError) as error:  # RuntimeError: this user has no home folder
        reason = getattr(error, "strerror", None) or error
        raise StartupError(
            f"{path}: Ray's token cannot be kept there: {reason}; set RAY_AUTH_TOKEN_PATH to another file"
        ) from None
