"""The supervisor of one host: starts the mesh's processes, restarts what dies, stops them in order.

``backoff`` decides when to restart; ``child`` is one process; ``supervisor`` runs them; ``mesh`` says which they are;
``keeper`` restarts the supervisor itself when it runs detached. Engines belong to the sidecar and outlive all of these.
"""
