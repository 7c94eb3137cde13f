from services.cli.doctor import main

if __name__ == "__main__":
    main()
