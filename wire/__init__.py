"""The messages between Roost's processes, the typed sockets that carry them, and the error taxonomy.

Nothing else in the project knows ZeroMQ or the bytes on the wire. Imports nothing of ours.
"""
