"""The protocol: who may say what to whom, and the keys, seals and pieces it rests on.

No sockets, no clock, no hidden randomness: entropy comes in as an argument, and of these files only
`keyfile` and `coalition_file` touch the disk.
"""
