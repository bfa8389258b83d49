"""A SGLang server of ours: ``python -m backends.sglang.launch``, SGLang's own arguments.

Each process of the server comes by here before it imports SGLang: those that it spawns run this module's body first.
"""

from __future__ import annotations

import os
import sys

if os.environ.get("SGLANG_USE_CPU_ENGINE") == "1":
    from backends.sglang import cpu_standins

    cpu_standins.install_import_stubs()
    cpu_standins.drop_pinned_memory()


def main() -> None:
    """Serve until the end."""
    from sglang.launch_server import run_server
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args

    load_plugins()
    run_server(prepare_server_args(sys.argv[1:]))


if __name__ == "__main__":
    main()
