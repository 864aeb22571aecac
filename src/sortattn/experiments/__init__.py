"""The paper's experiments, one command each: `capacity`, `recall`, `mqar`, and `report`, which shows all results.

`commands` has their options; what a command needs is imported when it runs. The speed tables are in `sortattn.bench`.
"""
