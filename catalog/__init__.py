"""The durable catalog of bases, policies, revisions, channels and keys, and the store of artifacts.

One registrar process makes every write: a command is checked against the view, becomes journalled events, and is
acknowledged once they are fsynced. Every other process of the host reads the view by memory map. Imports wire only.
"""
