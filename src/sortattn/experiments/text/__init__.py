"""`sortattn text`: a text encoder distilled to another attention, and what it then is worth.

`data` reads local files, `encoder` makes embeddings, `metrics` and `evaluate` measure them, `command` is the command.
"""
