from services.cli.top import main

if __name__ == "__main__":
    main()
