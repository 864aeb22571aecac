"""The paper's experiments, one command each: `capacity`, `recall`, `mqar`, `text`; `report` shows all results.

`commands` has the options of the small ones; what a command needs is imported when it runs. The speed tables are in
`sortattn.bench`.
"""
