"""The paper's experiments, one folder and one command each."""
