"""Inside a worker: an adapter goes from the host's arena into a slot, without a file and without an object a tensor.

``segment`` (the mapping and its records), ``header`` (the revision's layout), ``slots`` (what of the model is
adaptable), ``plan`` (what has to move where, once a layout), ``writer`` (who moves it: ``cpu`` or ``cuda``),
``install`` (all of it, or no trace). Imported by ``backends.vllm.worker`` alone.
"""
