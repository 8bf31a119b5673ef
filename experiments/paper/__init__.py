"""The paper's tables 1 to 8 and figure 5 at a chosen scale."""
