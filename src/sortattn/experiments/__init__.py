"""The paper's experiments, one command each: `capacity`, `recall`, `mqar`, `text`, `vision`; `report` shows them.

`commands` has the options of the small ones; what a command needs is imported when it runs. The speed tables are in
`sortattn.bench`.
"""
