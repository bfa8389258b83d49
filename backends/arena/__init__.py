"""Inside an engine's process: the host's arena as every engine reads it.

``segment`` (the mapping, and the records by which an extent is known) and ``header`` (a revision's layout, read once:
``cache``). Imports no torch: what the bytes become is each engine's own.
"""
