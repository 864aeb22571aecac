"""`sortattn bench`: time and memory against N, beside softmax, in the same run.

`cases` says what is measured, `measure` and `memory` measure it, `store` keeps the rows, `run` goes through them,
`summary`, `plot` and `report` show them. `grid` is another command, `sortattn grid`: errors instead of times.
"""
