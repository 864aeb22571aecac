"""CUDA C++ compiled at run time: sources in, launches out. Nothing here knows about attention."""
