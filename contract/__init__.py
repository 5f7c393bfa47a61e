"""What two machines must agree on: files, messages, images, noise and tokens; no torch, no onnx, no sockets.

Deciding what to do with them is left to the exporter, the device and the server.
"""
