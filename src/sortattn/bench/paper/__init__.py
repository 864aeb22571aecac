"""`sortattn bench --paper`: the paper's Tables 2 and 5 from this machine, beside the paper's own figures.

`methods` says what is measured, `run` measures it as the paper does, `tables` and `plot` show it, `command` is the
command. `rtx5090.csv` holds the paper's figures.
"""
