"""`launch_server_cmd` under the name that newer pages import it by."""

from sglang.utils import launch_server_cmd

__all__ = ["launch_server_cmd"]
