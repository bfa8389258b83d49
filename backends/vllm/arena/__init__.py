"""Inside a worker: an adapter goes from the host's arena into a slot, without a file and without an object a tensor.

``backends.arena`` maps it and reads what lies there. ``adaptable`` and ``modules`` (what of the model adapters can
reach), ``plan`` (what has to move where, once a layout), ``writer`` (who moves it: ``cpu`` or ``cuda``), ``install``
(all of it, or no trace), ``prepare`` (made ready at the start). Imported by ``backends.vllm.worker`` alone.
"""
