"""The paper's tables and figure as commands: what is run, at which scale, and what came out."""
