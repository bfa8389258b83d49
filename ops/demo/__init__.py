"""The main job end to end on real parts: ``python -m ops.demo`` (``make demo``).

Makes a small base model, trains adapters on it with PEFT, publishes and serves them, and checks every answer.
``base`` and ``train`` run in a process of their own, as torch is theirs alone.
"""
