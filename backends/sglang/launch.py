"""A SGLang server of ours: ``python -m backends.sglang.launch``, with SGLang's own arguments.

Every process of the server comes by here before it imports SGLang, as those that it spawns run this module's body
first. What is put right inside them waits for the driver's word (``ACTIVATION``).
"""

from __future__ import annotations

import os
import sys

from backends.sglang.terms import CPU_VARIABLE
from backends.terms import ACTIVATION

if os.environ.get(CPU_VARIABLE) == "1":
    from backends.sglang import cpu_standins

    cpu_standins.install_import_stubs()
    cpu_standins.drop_pinned_memory()
if os.environ.get(ACTIVATION) == "1":
    from backends.sglang import plugin

    plugin.hook()


def main() -> None:
    """Serve until the end."""
    from sglang.launch_server import run_server
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    load_plugins()
    if os.environ.get(ACTIVATION) == "1":
        from backends.sglang import server

        server.patch()
    try:
        run_server(prepare_server_args(sys.argv[1:]))
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


if __name__ == "__main__":
    main()
