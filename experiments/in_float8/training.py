def run(options): pass
