"""`sortattn recall`: the associative recall of the paper's section 4.1.

`training` trains a batch of runs with the Adam of `adam`, `gpu` does so with the steps of `fused`, whose kernels are in
`step_kernels`; `command` goes through the batches and keeps their rows, `plot` draws them.
"""
