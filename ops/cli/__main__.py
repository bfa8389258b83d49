"""``python -m ops.cli``: the same as the ``roost`` command."""

from . import main

main()
