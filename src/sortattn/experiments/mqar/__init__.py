"""`sortattn mqar`: multi-query associative recall, as in the Zoology benchmark (Arora et al., 2023).

`task` makes the sequences, `model` is the small transformer, `training` trains one, `gpu` several side by side;
`command` goes through a sweep and keeps its rows, `plot` draws them.
"""
