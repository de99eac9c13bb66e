"""The only room that knows numba, Triton or an address in memory; each kernel stands beside its definition in torch.

* ``rows``: norms of examples and of their patches, normalisation with a floored divisor, pairs of channels in order
* ``normals``: standard normals in float64 from a key
* ``multilinear``: a keyed hash of the bits of tensors
* ``numeric_environment``: what decides the last bits of a sum, whether they repeat, and the switches of torch that let
  products round further
* ``loops`` decides between a compiled loop, a GPU's kernel and torch; ``cpu`` holds the loops and runs them, and
  ``gpu`` holds the kernels
"""
