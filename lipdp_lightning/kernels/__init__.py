"""The only room that knows numba, Triton or an address in memory; each kernel stands beside its definition in torch.

* ``pairs``: puts pairs of channels in order (MaxMin)
* ``floored``: normalises rows with a floored divisor
* ``rows``: norms of examples and of their patches
* ``normals``: standard normals in float64 from a key
* ``multilinear``: a keyed hash of the bits of tensors
* ``arithmetic``: the switches of torch that let products round further
* ``environment``: what decides the last bits of a sum, and whether they repeat
* ``precision``: arithmetic in float32 at least
* ``loops`` decides between a compiled loop, a GPU's kernel and torch; ``cpu`` holds the loops, ``threads`` runs them,
  and ``gpu`` holds the kernels
"""
