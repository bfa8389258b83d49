"""``python -m ops.supervise STATE_DIR KEEPER_PID``: a detached supervisor, on the configuration saved in the folder."""

from __future__ import annotations

import logging
import sys

from wire.outcomes import RoostError

from ..layout import Layout
from .run import saved_config, supervise
from .state import Identity, MeshState, Phase

# the keeper's cue: this mesh ran, so what ended it may be over
BROKE_LATER = 3


def main() -> int:
    """0 after a signal, 1 where the mesh could not be started, BROKE_LATER where it could."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    layout = Layout.of(sys.argv[1])
    config = saved_config(layout)
    if config is None:
        logging.error("%s holds no configuration that can be read: run `roost up`", layout.config_file)
        return 1
    ran = False

    def watch(state: MeshState) -> None:
        nonlocal ran
        ran = ran or state.phase is Phase.READY

    try:
        supervise(config, layout, keeper=Identity.of(int(sys.argv[2])), note=logging.info, on_state=watch)
    except RoostError as error:
        logging.error("%s", error.message)
    except Exception:
        logging.exception("the supervisor broke")
    else:
        return 0
    return BROKE_LATER if ran else 1


if __name__ == "__main__":
    sys.exit(main())
