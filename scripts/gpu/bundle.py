def bundle(folder):
    return 0
