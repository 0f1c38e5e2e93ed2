"""Top-k gradient compression for autopar: a planning half and a runtime half."""
