"""Adapter formats in, revision files out, and back again; what a base's modules are called and how they are shaped.

A library without sockets and without torch: the command, the gateway and the engines' drivers call it. It trusts no
byte that it reads. May import wire and catalog.
"""
