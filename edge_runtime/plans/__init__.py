"""TensorRT plans: built from a package's frontend where they run, known again or built anew, judged before they serve.

A plan is a cache and machine code: it is made here, by this device, or it is not opened (`store`). `build` runs the
builder in a process of its own (`child`), `half` gives the network its types, `choose` gates and measures what came.
"""
