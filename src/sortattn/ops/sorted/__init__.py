"""Exact kernel sums in quasi linear time, by sorting every dimension."""
