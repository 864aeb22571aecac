"""Python compiled by Numba at run time, and what that lacks: vectors. Nothing here knows about attention."""
