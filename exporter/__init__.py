"""Turn a pre-trained torch model into a signed device package and the backend that stays on the server.

Running the package is left to edge_runtime, training the backend to server_runtime.
"""
