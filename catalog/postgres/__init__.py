"""The journal in PostgreSQL, for a catalog of many hosts.

Any host's registrar appends to it: a batch of commands is one transaction under an advisory lock, decided by the same
code over the rows that it names (rows.py, journal.py, ledger.py). A follower on every host applies what was appended
to the host's LMDB, which readers keep reading whether PostgreSQL is there or not (follower.py, local_view.py).
"""
