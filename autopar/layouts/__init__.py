"""How tensors lie on the mesh: layouts, conversions between them, and what a candidate implies."""
