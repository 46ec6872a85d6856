"""Tasks: data, model choice and metric of one task each."""
