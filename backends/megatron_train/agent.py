"""torchrun, tied to the control's life: it starts this host's ranks and ends them all when one dies.

``python -m backends.megatron_train.agent RANKS SETTINGS_FILE [TORCHRUN_OPTION...]``. Hosts beside the control's run the
same with torchrun's options for several nodes.
"""

from __future__ import annotations

import os
import sys

from .rank import die_with_parent

# the control's process id
CONTROL_VARIABLE = "ROOST_TRAINER_CONTROL"


def main() -> None:
    die_with_parent(int(os.environ.pop(CONTROL_VARIABLE, "0")))
    from torch.distributed.run import main as torchrun

    ranks, settings, *options = sys.argv[1:]
    where = options or ["--standalone"]
    torchrun([f"--nproc-per-node={ranks}", "--max-restarts=0", *where, "-m", "backends.megatron_train.rank", settings])


if __name__ == "__main__":
    main()
