"""Drawings of a comparison with matplotlib, which only this folder loads (the extra ``lightning-balance[report]``)."""
