"""Decoding images to uint8 arrays, from image files, raw bytes and objects in memory."""
