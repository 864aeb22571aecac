"""One way of computing per module or folder; each knows nothing of the others."""
