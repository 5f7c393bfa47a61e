"""The device's half: a signed package and a folder of images in, protected features out.

It never imports torch, timm, onnx, the exporter or the server; what two machines agree on lives in `contract`.
"""
