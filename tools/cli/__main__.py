from dsv4tune.tools.cli import app

if __name__ == "__main__":
    app()
