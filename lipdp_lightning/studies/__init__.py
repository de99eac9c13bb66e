"""Studies of papers and of costs. They use the engine, and no room of the engine imports them.

``reproduce`` makes the papers' tables and figures again, ``dynamics`` follows the kernels of small networks under
clipping and scalings, ``parties`` sums statistics of several parties, and the modules beside them measure what a step
costs.
"""
