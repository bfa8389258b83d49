"""The main job end to end on real parts: ``python -m ops.demo`` (``make demo``).

Makes a small base model, trains policies over it by a recipe on the mesh's own trainer, serves them, and checks every
answer. What was trained is kept, and published again by the next run. ``base`` and ``train`` run in processes of their
own, as torch is theirs alone.
"""
