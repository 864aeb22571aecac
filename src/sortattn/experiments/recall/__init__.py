"""`sortattn recall`: the associative recall of the paper's section 4.1.

`training` trains a batch of runs, `command` goes through the batches and keeps their rows, `plot` draws them.
"""
